"""Number formats: MXFP8, NVFP4, block-wise float8, group-wise integers."""
