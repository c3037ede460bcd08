"""The compression policies: conf/policy/NAME.yaml names the module and class of each."""
