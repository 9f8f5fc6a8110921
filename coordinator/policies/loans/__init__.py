"""What services can lend, for how long, and to whom. Must not know how it is taken back."""
