"""Growth inside other training libraries: Lightning and transformers; each is imported only on use."""
