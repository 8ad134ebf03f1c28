"""What wholestep costs, and how it compares with its peers."""
