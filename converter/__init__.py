"""Images, tars and directories into layers of the format."""
