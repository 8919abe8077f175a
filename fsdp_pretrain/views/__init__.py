"""Views of a run: status, live view, report and trackers. They only read the record."""
