"""What devices and links do, and how long: one `Hardware` value, described by data sheets or measured."""
