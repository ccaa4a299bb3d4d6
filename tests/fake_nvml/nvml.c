/* A fake NVML that answers from a script (FAKE_NVML_SCRIPT; see __init__.py).
 *
 * Its ABI is that of the real library, as far as nvidia-ml-py uses it. No call
 * holds the lock while it is delayed, so one hung GPU leaves the rest usable.
 */
#include "script.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

enum { DOUBLE, UINT, ULONG, ULONGLONG, SLONGLONG, INT, USHORT }; /* nvmlValueType_t */

static const int64_t SECOND = 1000000000, RELOAD_CHECK = 20000000;

/* A handle is the address of an element: it stays valid whatever is reloaded. */
struct handle { char unused; };
static struct handle handles[MAX_DEVICES];
typedef struct handle *nvmlDevice_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Tables replaced are kept (->older): a call asleep may still point into one. */
static struct table *table;
static struct stat seen;       /* the script file last read */
static bool bad_script = true; /* that reading failed */
static int64_t next_check_ns;
static int n_inits;
static _Atomic bool opened[MAX_DEVICES];

static int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

/* Signals only interrupt this sleep, as they do a call stuck in the driver. */
static void sleep_until(int64_t from_ns, int64_t takes_ns)
{
    bool for_ever = takes_ns < 0 || takes_ns > INT64_MAX / 2;
    int64_t end = for_ever ? INT64_MAX : from_ns + takes_ns;
    struct timespec until = {end / SECOND, end % SECOND};
    do
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
            ;
    while (for_ever);
}

/* A handler (faulthandler, say) sees the signal first, then the process dies. */
_Noreturn static void die(int number)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    raise(number);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    raise(number);
    _exit(128 + number);
}

/* Read the script again if its file is another one than that last read. */
static void refresh(int64_t now_ns, bool at_once)
{
    const char *path = getenv("FAKE_NVML_SCRIPT");
    struct stat found;
    if (now_ns < next_check_ns && !at_once)
        return;
    next_check_ns = now_ns + RELOAD_CHECK;
    if (!path || stat(path, &found) != 0) {
        if (at_once)
            fprintf(stderr, "fake nvml: no script at FAKE_NVML_SCRIPT=%s\n", path ? path : "");
        bad_script |= at_once;
        return;
    }
    if (!bad_script && found.st_ino == seen.st_ino && found.st_dev == seen.st_dev
        && found.st_size == seen.st_size && found.st_mtim.tv_sec == seen.st_mtim.tv_sec
        && found.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    seen = found;
    struct table *loaded = table_load(path, table);
    bad_script = !loaded;
    if (loaded)
        table = loaded;
}

/* What the script says to one call: its return code, and the step with values. */
static int answer(int function, int device, const struct step **step)
{
    bool init = function == FN_nvmlInit;
    int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    int ret = SUCCESS;
    *step = NULL;
    pthread_mutex_lock(&lock);
    if (!init && n_inits == 0) {
        ret = UNINITIALIZED;
    } else {
        refresh(now_ns, init);
        if (init && bad_script)
            ret = UNKNOWN;
        else if (device > 0 && device >= table->n_devices)
            ret = INVALID_ARGUMENT;
        else
            *step = table_pick(table, function, device, now_ns - table->epoch_ns);
    }
    pthread_mutex_unlock(&lock);
    if (!*step)
        return ret;
    if ((*step)->takes_ns)
        sleep_until(now_ns, (*step)->takes_ns);
    if ((*step)->ret == CRASH)
        die((*step)->signal);
    return (*step)->ret;
}

static int answer_device(int function, int device, const struct step **step)
{
    if (!opened[device]) { /* a GPU without persistence mode wakes up first */
        int ret = answer(FN_firstCallAfterOpen, device, step);
        if (ret == UNINITIALIZED || ret == INVALID_ARGUMENT)
            return ret;
        opened[device] = true;
        if (ret != SUCCESS)
            return ret;
    }
    return answer(function, device, step);
}

static int answer_handle(int function, nvmlDevice_t handle, const void *out,
                         const struct step **step)
{
    int device = (int)(handle - handles);
    bool known = handle >= handles && handle < handles + MAX_DEVICES;
    int ret = known ? answer_device(function, device, step) : answer(FN_nvmlShutdown, 0, step);
    return ret == SUCCESS && (!known || !out) ? INVALID_ARGUMENT : ret;
}

static struct table *current(void)
{
    pthread_mutex_lock(&lock);
    struct table *now = table;
    pthread_mutex_unlock(&lock);
    return now;
}

static const struct device *device_of(nvmlDevice_t handle)
{
    return &current()->devices[handle - handles];
}

/* The scripted value, else the default: the device's own or that of the table. */
static uint64_t value(const struct step *step, int function, nvmlDevice_t handle, int part)
{
    if (step && part < step->n_values)
        return step->values[part];
    switch (function) {
    case FN_nvmlDeviceGetIndex:
    case FN_nvmlDeviceGetModuleId:
        return (uint64_t)(handle - handles);
    case FN_nvmlDeviceGetMinorNumber:
        return device_of(handle)->minor;
    case FN_nvmlDeviceGetCount:
        return (uint64_t)current()->n_devices;
    case FN_nvmlDeviceGetTotalEnergyConsumption: { /* mJ, at the default power of 310 W */
        int64_t ms = (clock_ns(CLOCK_MONOTONIC) - current()->epoch_ns) / 1000000;
        return functions[function].values[0] + (uint64_t)(310 * ms);
    }
    default:
        return functions[function].values[part];
    }
}

static int put_text(char *out, unsigned length, const char *text)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int get_uint(int function, nvmlDevice_t handle, unsigned *out)
{
    const struct step *step;
    int ret = answer_handle(function, handle, out, &step);
    if (ret == SUCCESS)
        *out = (unsigned)value(step, function, handle, 0);
    return ret;
}

static int get_ull(int function, nvmlDevice_t handle, unsigned long long *out)
{
    const struct step *step;
    int ret = answer_handle(function, handle, out, &step);
    if (ret == SUCCESS)
        *out = value(step, function, handle, 0);
    return ret;
}

static int get_text(int function, nvmlDevice_t handle, char *out, unsigned length)
{
    const struct step *step;
    char text[96];
    int ret = answer_handle(function, handle, out, &step);
    if (ret != SUCCESS)
        return ret;
    if (step && step->text)
        return put_text(out, length, step->text);
    if (function == FN_nvmlDeviceGetUUID)
        return put_text(out, length, device_of(handle)->uuid);
    if (function == FN_nvmlDeviceGetName)
        return put_text(out, length, device_of(handle)->name);
    snprintf(text, sizeof text, functions[function].text, (int)(handle - handles));
    return put_text(out, length, text);
}

static int get_process_text(int function, char *out, unsigned length)
{
    const struct step *step;
    int ret = answer(function, 0, &step);
    if (ret != SUCCESS || !out)
        return ret != SUCCESS ? ret : INVALID_ARGUMENT;
    return put_text(out, length, step && step->text ? step->text : functions[function].text);
}

#define PROCESS(fn, ...)
#define PROCESS_TEXT(fn, text) \
    API int fn(char *out, unsigned length) { return get_process_text(FN_##fn, out, length); }
#define DEVICE(fn, ...)
#define DEVICE_UINT(fn, value) \
    API int fn(nvmlDevice_t handle, unsigned *out) { return get_uint(FN_##fn, handle, out); }
#define DEVICE_UINT_OF(fn, value)                        \
    API int fn(nvmlDevice_t handle, int which, unsigned *out) \
    {                                                    \
        (void)which;                                     \
        return get_uint(FN_##fn, handle, out);           \
    }
#define DEVICE_ULL(fn, value)                            \
    API int fn(nvmlDevice_t handle, unsigned long long *out) \
    {                                                    \
        return get_ull(FN_##fn, handle, out);            \
    }
#define DEVICE_TEXT(fn, text)                            \
    API int fn(nvmlDevice_t handle, char *out, unsigned length) \
    {                                                    \
        return get_text(FN_##fn, handle, out, length);   \
    }
#define DEVICE_KEY(fn, key, value)
#define EVENT(name)
#define FIELD(id, type, value)
#include "functions.def"
#include "undef.h"

API int nvmlInitWithFlags(unsigned flags)
{
    const struct step *step;
    int ret = answer(FN_nvmlInit, 0, &step);
    (void)flags;
    if (ret != SUCCESS)
        return ret;
    pthread_mutex_lock(&lock);
    if (n_inits++ == 0)
        for (int i = 0; i < MAX_DEVICES; i++)
            opened[i] = false;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API int nvmlShutdown(void)
{
    const struct step *step;
    int ret = answer(FN_nvmlShutdown, 0, &step);
    if (ret != SUCCESS)
        return ret;
    pthread_mutex_lock(&lock);
    if (n_inits > 0)
        n_inits--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API const char *nvmlErrorString(int ret)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported",
        "Insufficient Permissions", "Already Initialized", "Not Found", "Insufficient Size",
        "Insufficient External Power", "Driver Not Loaded", "Timeout",
        "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch",
        "In use by another client", "Insufficient Memory", "No data",
        "The requested vgpu operation is not available on target device, because ECC is enabled",
        "Insufficient Resources", "Frequency not supported", "Argument Version Mismatch",
        "Deprecated", "Not Ready", "GPU not found", "Invalid state", "Reset type not supported"
    };
    return ret >= 0 && ret < (int)(sizeof texts / sizeof *texts) ? texts[ret] : "Unknown Error";
}

static int get_process_uint(int function, unsigned *out)
{
    const struct step *step;
    int ret = answer(function, 0, &step);
    if (ret == SUCCESS && !out)
        return INVALID_ARGUMENT;
    if (ret == SUCCESS)
        *out = (unsigned)value(step, function, NULL, 0);
    return ret;
}

API int nvmlDeviceGetCount_v2(unsigned *out)
{
    return get_process_uint(FN_nvmlDeviceGetCount, out);
}

API int nvmlSystemGetCudaDriverVersion(int *out)
{
    return get_process_uint(FN_nvmlSystemGetCudaDriverVersion, (unsigned *)out);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    return nvmlSystemGetCudaDriverVersion(out);
}

static int open_handle(int function, int device, nvmlDevice_t *out)
{
    const struct step *step;
    int ret = answer_device(function, device, &step);
    if (ret == SUCCESS)
        *out = &handles[device];
    return ret;
}

static int number_of_devices(void)
{
    struct table *now = current();
    return now ? now->n_devices : 0;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    const struct step *step;
    if (out && index < (unsigned)number_of_devices())
        return open_handle(FN_nvmlDeviceGetHandleByIndex, (int)index, out);
    return answer(FN_nvmlShutdown, 0, &step) == UNINITIALIZED ? UNINITIALIZED : INVALID_ARGUMENT;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *out)
{
    unsigned domain, bus, slot, function;
    int n = number_of_devices(), length = -1;
    if (n && (!address || !out))
        return INVALID_ARGUMENT;
    if (n && sscanf(address, "%8x:%2x:%2x.%1x%n", &domain, &bus, &slot, &function, &length) == 4
        && !address[length])
        for (int i = 0; i < n; i++) {
            const struct device *device = &current()->devices[i];
            if (device->domain == domain && device->bus == bus && device->slot == slot
                && device->pci_function == function)
                return open_handle(FN_nvmlDeviceGetHandleByPciBusId, i, out);
        }
    return NOT_FOUND;
}

/* The driver asks each GPU in turn, so one that is stuck or lost spoils it. */
API int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    int n = number_of_devices();
    if (n && (!uuid || !out))
        return INVALID_ARGUMENT;
    for (int i = 0; i < n; i++) {
        int ret = open_handle(FN_nvmlDeviceGetHandleByUUID, i, out);
        if (ret != SUCCESS || strcasecmp(current()->devices[i].uuid, uuid) == 0)
            return ret;
    }
    return NOT_FOUND;
}
