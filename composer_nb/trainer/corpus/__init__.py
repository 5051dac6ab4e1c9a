"""From folders of repositories to text for mid-training: licences, quality, duplicates, contamination, order."""
