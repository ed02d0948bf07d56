"""The template (elsewhere called zygote or fork server): the process that ranks are forked from."""
