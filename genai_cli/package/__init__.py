"""A model folder on disk -> ModelPackage: what its files declare, checked, before any weight is read."""
