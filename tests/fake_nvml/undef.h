/* Forget the macros through which functions.def was last read. */
#undef PROCESS
#undef PROCESS_TEXT
#undef DEVICE
#undef DEVICE_UINT
#undef DEVICE_UINT_OF
#undef DEVICE_ULL
#undef DEVICE_TEXT
#undef DEVICE_KEY
#undef EVENT
#undef FIELD
