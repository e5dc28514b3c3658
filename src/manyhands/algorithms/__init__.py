"""Update math only: an algorithm knows no ranks, processes, environments or files."""
