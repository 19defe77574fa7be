"""What the commands around runs are made of: find them, look at them, show, cancel and start them again."""
