"""What a person sees of a run: its folder, its numbers, its progress, where its time went."""
