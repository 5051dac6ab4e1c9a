"""The mismatch microscope: why engine and trainer disagree on a log-probability."""
