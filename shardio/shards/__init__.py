"""The files of a dataset: where they lie, and which of them are open."""
