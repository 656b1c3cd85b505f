"""From a loader's sampler arguments to the index batches that its engine is fed with."""
