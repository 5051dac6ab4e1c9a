"""System calls, system call filters and control groups."""
