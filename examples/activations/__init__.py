"""What a long run is made of: its texts, the model on a mesh, and the store of what it sees."""
