"""What people look at: status, the live view, the report and trackers. They only read the record."""
