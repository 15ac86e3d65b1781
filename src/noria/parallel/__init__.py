"""Several devices as one: the mesh, which axis of what is split over it, and where arrays lie."""
