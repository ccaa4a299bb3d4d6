/* The script of the fake NVML (what each call answers, and when), and the state
 * of one process that answers from it. */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

enum { MAX_DEVICES = 64, MAX_FIELDS = 512, CRASH = -1 };

enum { INIT_FLAG_NO_GPUS = 1, INIT_FLAG_NO_ATTACH = 2 };

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

enum function {
#define PROCESS(fn, ...) FN_##fn,
#define PROCESS_TEXT(fn, text) FN_##fn,
#define DEVICE(fn, ...) FN_##fn,
#define DEVICE_UINT(fn, value) FN_##fn,
#define DEVICE_UINT_OF(fn, value) FN_##fn,
#define DEVICE_ULL(fn, value) FN_##fn,
#define DEVICE_TEXT(fn, text) FN_##fn,
#define DEVICE_KEY(fn, key, value) FN_##fn##_##key,
#define EVENT(name) FN_##name,
#define FIELD(id, type, value)
#include "functions.def"
#include "undef.h"
    FN_COUNT, /* field value N is function FN_COUNT + N */
};

struct function_info {
    const char *name;
    enum { SCOPE_PROCESS, SCOPE_DEVICE, SCOPE_EVENT } scope;
    const char *text;
    uint64_t values[4];
};

extern const struct function_info functions[FN_COUNT];

struct device {
    char uuid[96], name[96];
    unsigned domain, bus, slot, pci_function, minor;
};

struct step {
    int64_t start_ns;  /* from the epoch on */
    int64_t takes_ns;  /* -1: for ever */
    int64_t times;     /* -1: no such limit */
    int64_t span_ns;   /* how long it holds; -1: no such limit */
    int function;      /* -1: any; else the first of a run of functions */
    int n_functions;
    int device;        /* -1: all */
    int rank;          /* the more specific of two steps of one time wins */
    int ret, signal;
    int n_values;
    uint64_t *values;
    char *text;        /* NULL: none */
    int64_t *used;     /* by device, counted in this process */
    uint64_t hash;     /* of the line, to find it again after a reload */
    int line;
};

struct table {
    int64_t epoch_ns;
    int n_devices;
    struct device devices[MAX_DEVICES];
    int n_steps;
    struct step **steps;
    struct slot *slots; /* by function and device */
    struct table *older;
};

/* Read the script, or say on stderr what is wrong with it and return NULL.
 * Steps that stand unchanged at the head of both keep the older one's counts. */
struct table *table_load(const char *path, struct table *older);

/* The step that answers this call now, counted as used; NULL: none does. */
const struct step *table_pick(struct table *table, int function, int device, int64_t now_ns);

/* What the script says to one call: its return code, and the step with values
 * (NULL: the defaults), after the delay it asks for. */
int answer(int function, int device, const struct step **step);

/* The same for a call on a device, which may be the first after init. */
int answer_device(int function, int device, const struct step **step);

int open_library(bool attach);
int close_library(void);

/* Whether GPUs can be found: with NO_ATTACH the real library (580, H200) counts
 * none and finds no handle. NO_GPUS alone changes nothing that can be seen. */
bool attaching(void);

/* The script as it is now, read again if it changed; NULL: not initialised. */
struct table *ready(void);

/* The script last read. */
struct table *current(void);

int64_t clock_ns(clockid_t clock);

#endif
