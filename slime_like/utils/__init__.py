"""Small tools without a layer of their own: plugins and files."""
