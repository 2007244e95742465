"""Attention of query rows over key rows: one kernel set per folder or module."""
