"""The HTTP API and the page of a manager. Needs the extra `fireflyer[platform]`."""
