"""Runs on a Ray cluster. A launch imports Ray itself only when it asks for it."""
