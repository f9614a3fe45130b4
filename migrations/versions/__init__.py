"""The revisions; users may name this package in their ``version_locations``."""
