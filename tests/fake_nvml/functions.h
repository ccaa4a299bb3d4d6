/* Reads functions.def. Define what to make of an entry before including this:
 *   ENTRY(FN_name, "name", scope, text, per second, n, n, n, default...)   for every name
 * or one of the kinds of entry; all else is left out, and the macros are gone afterwards.
 * (A name is never passed on as it is: a test may have it replaced with -D, to build a
 * library without that symbol.)
 */
#ifndef ENTRY
#define ENTRY(...)
#endif
#ifndef PROCESS
#define PROCESS(fn, ...) ENTRY(FN_##fn, #fn, SCOPE_PROCESS, NULL, 0, 0, 0, 0, __VA_ARGS__)
#endif
#ifndef PROCESS_TEXT
#define PROCESS_TEXT(fn, text) ENTRY(FN_##fn, #fn, SCOPE_PROCESS, text, 0, 0, 0, 0, 0)
#endif
#ifndef DEVICE
#define DEVICE(fn, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, 0, 0, 0, __VA_ARGS__)
#endif
#ifndef DEVICE_OF
#define DEVICE_OF(fn, n, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, n, 0, 0, __VA_ARGS__)
#endif
#ifndef DEVICE_OF2
#define DEVICE_OF2(fn, n, m, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, n, m, 0, __VA_ARGS__)
#endif
#ifndef UINT
#define UINT(fn, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, 0, 0, 0, __VA_ARGS__)
#endif
#ifndef UINTS
#define UINTS(fn, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, 0, 0, 0, __VA_ARGS__)
#endif
#ifndef UINT_OF
#define UINT_OF(fn, n, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, n, 0, 0, __VA_ARGS__)
#endif
#ifndef ULL
#define ULL(fn, value, per_second) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, per_second, 0, 0, 0, value)
#endif
#ifndef ULL_OF2
#define ULL_OF2(fn, n, m, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, n, m, 0, __VA_ARGS__)
#endif
#ifndef ULL_OF3
#define ULL_OF3(fn, n, m, l, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, n, m, l, __VA_ARGS__)
#endif
#ifndef TEXT
#define TEXT(fn, text) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, text, 0, 0, 0, 0, 0)
#endif
#ifndef STRUCT
#define STRUCT(fn, layout, ...) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, layout, 0, 0, 0, 0, __VA_ARGS__)
#endif
#ifndef PROCESSES
#define PROCESSES(fn) ENTRY(FN_##fn, #fn, SCOPE_DEVICE, NULL, 0, 0, 0, 0, 0)
#endif
#ifndef STATE
#define STATE(name) ENTRY(FN_##name, #name, SCOPE_PROCESS, NULL, 0, 0, 0, 0, 0)
#endif
#ifndef EVENT
#define EVENT(name) ENTRY(FN_##name, #name, SCOPE_PART, NULL, 0, 0, 0, 0, 0)
#endif
#ifndef ELEMENT
#define ELEMENT(name) ENTRY(FN_##name, #name, SCOPE_PART, NULL, 0, 0, 0, 0, 0)
#endif
#ifndef FIELD
#define FIELD(...)
#endif
#ifndef METRICS
#define METRICS(...)
#endif

#include "functions.def"

#undef ENTRY
#undef PROCESS
#undef PROCESS_TEXT
#undef DEVICE
#undef DEVICE_OF
#undef DEVICE_OF2
#undef UINT
#undef UINTS
#undef UINT_OF
#undef ULL
#undef ULL_OF2
#undef ULL_OF3
#undef TEXT
#undef STRUCT
#undef PROCESSES
#undef STATE
#undef EVENT
#undef ELEMENT
#undef FIELD
#undef METRICS
