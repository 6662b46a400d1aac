"""What an operator may ask for, checked: flags and files, versions and packages that options depend on."""
