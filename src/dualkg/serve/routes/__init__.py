"""Routes: what can be asked, each file one kind of question."""
