"""What meets a deadline: predictions, plans, promises. Must not know who decides."""
