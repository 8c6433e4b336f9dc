"""The published tables and figures, made from the cells of a grid."""
