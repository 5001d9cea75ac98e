"""Training a controller: the loop, what it is built from, where its files live, and how it survives being killed."""
