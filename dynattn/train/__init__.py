"`dynattn train`: an encoder learns from files."
