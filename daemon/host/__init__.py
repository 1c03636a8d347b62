"""This machine: lock, port checks, file systems, systemd, doctor, backup."""
