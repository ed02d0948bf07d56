"""The template, which others call a zygote or a fork server: the process that ranks are forked from."""
