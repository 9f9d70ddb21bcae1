"""The compiled extension. Import `fireflyer.native`, never `_core` directly."""
