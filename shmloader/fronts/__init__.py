"""What users see: the loaders and their iterators."""
