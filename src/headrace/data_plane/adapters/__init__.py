"""The stores behind DataPlaneClient, one module each; `headrace.data_plane.factory` chooses."""
