"""Exactness on the road: run inside the image, or in any environment with torch."""
