"""What each head is: scores of the classes that the field uses, of its attention and of its weights."""
