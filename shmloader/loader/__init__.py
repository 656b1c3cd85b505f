"""The loaders, their arguments and their iterators."""
