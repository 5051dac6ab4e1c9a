"""From folders of repositories to text that mid-training reads: licences, quality, duplicates, contamination, order."""
