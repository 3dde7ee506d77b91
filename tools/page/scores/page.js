// page
paintAll();
