"""The loaders, and their iterators."""
