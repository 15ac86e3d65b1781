"""Several engines behind one address: which request goes where, and how they are run by Ray Serve."""
