"""What must outlive the server's process."""
