"""Programs beside the nine techniques; nothing imports them but other tools and the tests."""
