/* The script of the fake NVML (what each call answers, and when), and the state
 * of one process that answers from it. */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define API __attribute__((visibility("default")))

/* A default that stands for NOT_SUPPORTED. */
#define UNSUPPORTED 0xfeedbeefdeadfa11

/* GPUs are numbered from 0, MIG devices from MAX_GPUS on. */
enum { MAX_GPUS = 64, MAX_DEVICES = 256, MAX_MIG_DEVICES = 7 };
enum { MAX_KEYS = 3, MAX_DEFAULTS = 9, N_LINKS = 18, ANY = -1, CRASH = -1 };

enum { INIT_FLAG_NO_GPUS = 1, INIT_FLAG_NO_ATTACH = 2 };

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

enum value_type { DOUBLE, UINT, ULONG, ULONGLONG, SLONGLONG, INT, USHORT }; /* nvmlValueType_t */

enum function {
#define ENTRY(id, ...) id,
#include "functions.h"
    FN_COUNT
};

struct function_info {
    const char *name;
    enum { SCOPE_PROCESS, SCOPE_DEVICE, SCOPE_PART } scope; /* a part: not a call of its own */
    const char *text;
    int per_second;
    int n[MAX_KEYS]; /* keys are below that; 0: no such key, or one without a limit */
    int n_values;
    uint64_t values[MAX_DEFAULTS];
};

extern const struct function_info functions[FN_COUNT];

struct device {
    char uuid[96], name[96];
    unsigned domain, bus, slot, pci_function, minor;
    int parent; /* ANY: it is a GPU; else it is a MIG device, with what follows */
    unsigned gpu_instance, compute_instance, slices;
    uint64_t memory_mib;
};

/* At a time it is start + per_second * (seconds since its step began), modulo wrap. */
struct number {
    uint64_t start;
    double per_second;
    uint64_t wrap; /* 0: 2^64 */
    bool given;    /* else it is the default */
    bool goes_on;  /* it starts from what it was when its step began */
};

struct step {
    int64_t start_ns;  /* from the epoch on */
    int64_t takes_ns;  /* -1: for ever */
    int64_t times;     /* -1: no such limit */
    int64_t span_ns;   /* how long it holds; -1: no such limit */
    int function;      /* or ANY */
    int64_t keys[MAX_KEYS]; /* or ANY */
    int device;        /* or ANY */
    int rank;          /* the more specific of two steps of one time wins */
    int ret, signal;
    bool listed;       /* the values are a list, of records maybe */
    int n_values;
    struct number *values;
    char *text;        /* NULL: none */
    int used[MAX_DEVICES]; /* counted in this process */
    uint64_t hash;     /* of the line, to find it again after a reload */
    int line;
};

enum { N_BUCKETS = 1024 };

struct table {
    int64_t epoch_ns;
    int n_gpus, n_migs;
    struct device devices[MAX_DEVICES];
    int n_steps;
    struct step **steps;
    struct slot *slots[N_BUCKETS]; /* of the calls made so far (timeline.c) */
    struct table *older;
};

/* One call: the function, the device (0 for a process-wide one) and what it asks of it. */
struct call {
    int function, device;
    int64_t keys[MAX_KEYS];
};

/* What the script says to a call. */
struct reply {
    struct table *table;
    const struct step *step; /* NULL: the defaults */
    int64_t now_ns;          /* from the epoch on */
    int index;               /* of the device among its like; ANY: it is not there */
    bool mig;                /* MIG mode is on */
};

/* The GPUs that are there, or the MIG devices of one, in the order of their index. */
struct roster {
    bool scripted;
    int n, devices[MAX_DEVICES];
};

/* script.c: the memory itself; there is no going on without. */
void *need(void *memory);

/* Read the script, or say on stderr what is wrong with it and return
 * NULL. Steps that stand unchanged at the head of both keep the older one's counts. */
struct table *table_load(const char *path, struct table *older);

/* Whether there is such a device, present or not. */
bool table_has(const struct table *table, int device);

/* timeline.c: the step that answers a call now, counted as used, and the one
 * that gave the value at an earlier time; NULL: none does. */
const struct step *table_pick(struct table *table, const struct call *call, int64_t now_ns);
const struct step *table_past(struct table *table, const struct call *call, int64_t then_ns);

/* roster.c: who is there, by the script's "devices" or, of a parent GPU, its "mig". */
void table_roster(struct table *table, int parent, int64_t now_ns, struct roster *out);
int roster_index(const struct roster *roster, int device);

/* users.c: show other processes that this one uses the library, or no longer. */
void enter_users(void);
void leave_users(void);

/* answer.c: the return code that the script says to one call, after the delay it asks for. */
int answer(const struct call *call, struct reply *reply);

/* The same for a call on a device (-1: a bad handle), which may be the first after init. */
int answer_device(const struct call *call, struct reply *reply);

/* What a call was or would have been answered at an earlier time. */
void answer_past(const struct call *call, int64_t then_ns, struct reply *reply);

/* With NO_ATTACH the real library (580, H200) counts no GPU and finds no handle.
 * NO_GPUS alone changes nothing that can be seen. */
int open_library(bool attach);
int close_library(void);

/* The script as it is now, read again if it changed; NULL: not initialised. */
struct table *ready(void);

/* Who is there now; NULL: not initialised. */
struct table *present(int parent, struct roster *out);

/* The version of the loaded kernel module, or that of this process's library. */
void driver_version(bool library, char out[80]);

int64_t clock_ns(clockid_t clock);

/* devices.c: a handle stays valid whatever is reloaded. */
typedef struct handle *nvmlDevice_t;

/* The device's number in the script, -1 for what is no handle. */
int number_of(nvmlDevice_t handle);

nvmlDevice_t handle_of(int device);

/* A call of a function, with up to three keys; ON: on the handle at hand. */
#define CALL(function, device, ...) (&(struct call){function, device, {__VA_ARGS__}})
#define ON(function, ...) CALL(function, number_of(handle), __VA_ARGS__)

/* calls.c: what the script says to a call on a device, with keys in range and a place for the result. */
int ask(const struct call *call, const void *out, struct reply *reply);

/* The scripted value of a part, else the default. */
uint64_t value(const struct call *call, const struct reply *reply, int part);

/* fields.c and gpm.c: the defaults of one field, and the bits of a metric's. */
uint64_t default_field(int64_t id, int64_t link, int64_t now_ns);
uint64_t default_metric(int64_t id);

/* mig.c: which calls work on a MIG device without a step, and their defaults. */
bool mig_answers(int function);
uint64_t default_mig(const struct call *call, const struct reply *reply, int part);

/* What a counter comes to in a time, if it can be counted at all. */
uint64_t advance(uint64_t start, double per_second, int64_t ns);

int put_text(char *out, unsigned length, const char *text);

#endif
