"""Functions called on the machines of a Ray cluster; nothing outside of this folder imports Ray."""
