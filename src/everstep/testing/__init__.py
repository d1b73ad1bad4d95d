"""What tests of training jobs need: emulated devices and a plain loop to compare with. Public."""
