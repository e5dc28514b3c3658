"""Where experience rests between acting and learning."""
