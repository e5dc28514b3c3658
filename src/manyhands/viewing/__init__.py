"""Looking at runs: curves, pictures, report, video, evaluation, export. Never changes one."""
