/* The entry points of the fake NVML, answering from a script (see __init__.py).
 * Their ABI is that of the real library, as far as nvidia-ml-py uses it.
 */
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define API __attribute__((visibility("default")))

enum { DOUBLE, UINT, ULONG, ULONGLONG, SLONGLONG, INT, USHORT }; /* nvmlValueType_t */

/* Structures of the real nvml.h, under names of our own. */
struct pci_info {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};
struct temperature { unsigned version; int sensor; int temperature; };
struct utilization { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
struct field {
    unsigned id, scope;
    long long timestamp_us, latency_us;
    unsigned type;
    int ret;
    unsigned long long value;
};

/* A handle is the address of an element: it stays valid whatever is reloaded. */
struct handle { char unused; };
static struct handle handles[MAX_DEVICES];
typedef struct handle *nvmlDevice_t;

static int number_of(nvmlDevice_t handle)
{
    return (int)((uintptr_t)handle - (uintptr_t)handles);
}

static int answer_handle(int function, nvmlDevice_t handle, const void *out,
                         const struct step **step)
{
    if (handle < handles || handle >= handles + MAX_DEVICES)
        return ready() ? INVALID_ARGUMENT : UNINITIALIZED;
    int ret = answer_device(function, number_of(handle), step);
    return ret == SUCCESS && !out ? INVALID_ARGUMENT : ret;
}

static const struct device *device_of(nvmlDevice_t handle)
{
    return &current()->devices[number_of(handle)];
}

/* The scripted value, else the default: the device's own or that of the table. */
static uint64_t value(const struct step *step, int function, nvmlDevice_t handle, int part)
{
    if (step && part < step->n_values)
        return step->values[part];
    switch (function) {
    case FN_nvmlDeviceGetIndex:
    case FN_nvmlDeviceGetModuleId:
        return (uint64_t)number_of(handle);
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
    snprintf(text, sizeof text, functions[function].text, number_of(handle));
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

API int nvmlInit_v2(void)
{
    return open_library(true);
}

API int nvmlInitWithFlags(unsigned flags)
{
    return open_library(!(flags & INIT_FLAG_NO_ATTACH));
}

API int nvmlShutdown(void)
{
    return close_library();
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
    int ret = get_process_uint(FN_nvmlDeviceGetCount, out);
    if (ret == SUCCESS && !attaching())
        *out = 0;
    return ret;
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

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    struct table *now = ready();
    if (!now)
        return UNINITIALIZED;
    if (!out || index >= (unsigned)now->n_devices || !attaching())
        return INVALID_ARGUMENT;
    return open_handle(FN_nvmlDeviceGetHandleByIndex, (int)index, out);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *out)
{
    unsigned domain, bus, slot, function;
    int length = -1;
    struct table *now = ready();
    if (!now)
        return UNINITIALIZED;
    if (!address || !out)
        return INVALID_ARGUMENT;
    if (sscanf(address, "%8x:%2x:%2x.%1x%n", &domain, &bus, &slot, &function, &length) != 4
        || address[length] || !attaching())
        return NOT_FOUND;
    for (int i = 0; i < now->n_devices; i++) {
        const struct device *device = &now->devices[i];
        if (device->domain == domain && device->bus == bus && device->slot == slot
            && device->pci_function == function)
            return open_handle(FN_nvmlDeviceGetHandleByPciBusId, i, out);
    }
    return NOT_FOUND;
}

/* The driver asks each GPU in turn, so one that is stuck or lost spoils it. */
API int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    struct table *now = ready();
    if (!now)
        return UNINITIALIZED;
    if (!uuid || !out)
        return INVALID_ARGUMENT;
    for (int i = 0; i < now->n_devices && attaching(); i++) {
        nvmlDevice_t handle;
        int ret = open_handle(FN_nvmlDeviceGetHandleByUUID, i, &handle);
        if (ret != SUCCESS)
            return ret;
        if (strcasecmp(now->devices[i].uuid, uuid) == 0) {
            *out = handle;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

API int nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, struct pci_info *out)
{
    const struct step *step;
    int ret = answer_handle(FN_nvmlDeviceGetPciInfo_v3, handle, out, &step);
    if (ret != SUCCESS)
        return ret;
    const struct device *device = device_of(handle);
    unsigned domain = device->domain, bus = device->bus, slot = device->slot;
    unsigned function = device->pci_function;
    if (step && step->text)
        sscanf(step->text, "%8x:%2x:%2x.%1x", &domain, &bus, &slot, &function);
    *out = (struct pci_info){.domain = domain, .bus = bus, .device = slot,
                             .device_id = 0x233010de, .subsystem_id = 0x16c110de};
    snprintf(out->legacy_id, sizeof out->legacy_id, "%04X:%02X:%02X.%X",
             domain & 0xffff, bus & 0xff, slot & 0xff, function & 0xf);
    snprintf(out->id, sizeof out->id, "%08X:%02X:%02X.%X", domain, bus, slot, function);
    return SUCCESS;
}

/* nvmlClockType_t counts as the keys in functions.def stand. */
static int get_clock(int first, nvmlDevice_t handle, unsigned type, unsigned *out)
{
    if (type > 3)
        return ready() ? INVALID_ARGUMENT : UNINITIALIZED;
    return get_uint(first + (int)type, handle, out);
}

API int nvmlDeviceGetClockInfo(nvmlDevice_t handle, unsigned type, unsigned *out)
{
    return get_clock(FN_nvmlDeviceGetClockInfo_graphics, handle, type, out);
}

API int nvmlDeviceGetMaxClockInfo(nvmlDevice_t handle, unsigned type, unsigned *out)
{
    return get_clock(FN_nvmlDeviceGetMaxClockInfo_graphics, handle, type, out);
}

API int nvmlDeviceGetTemperatureV(nvmlDevice_t handle, struct temperature *out)
{
    const struct step *step;
    int ret = answer_handle(FN_nvmlDeviceGetTemperatureV, handle, out, &step);
    if (ret == SUCCESS && out->version != (sizeof *out | 1 << 24))
        ret = ARGUMENT_VERSION_MISMATCH;
    if (ret == SUCCESS)
        out->temperature = (int)value(step, FN_nvmlDeviceGetTemperatureV, handle, 0);
    return ret;
}

API int nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, struct utilization *out)
{
    const struct step *step;
    int fn = FN_nvmlDeviceGetUtilizationRates, ret = answer_handle(fn, handle, out, &step);
    if (ret == SUCCESS) {
        out->gpu = (unsigned)value(step, fn, handle, 0);
        out->memory = (unsigned)value(step, fn, handle, 1);
    }
    return ret;
}

API int nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, struct memory *out)
{
    const struct step *step;
    int fn = FN_nvmlDeviceGetMemoryInfo, ret = answer_handle(fn, handle, out, &step);
    if (ret == SUCCESS) {
        out->total = value(step, fn, handle, 0);
        out->free = value(step, fn, handle, 1);
        out->used = value(step, fn, handle, 2);
    }
    return ret;
}

API int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, struct memory_v2 *out)
{
    const struct step *step;
    int fn = FN_nvmlDeviceGetMemoryInfo_v2, ret = answer_handle(fn, handle, out, &step);
    if (ret == SUCCESS && out->version != (sizeof *out | 2 << 24))
        ret = ARGUMENT_VERSION_MISMATCH;
    if (ret == SUCCESS) {
        out->total = value(step, fn, handle, 0);
        out->reserved = value(step, fn, handle, 1);
        out->free = value(step, fn, handle, 2);
        out->used = value(step, fn, handle, 3);
    }
    return ret;
}

API int nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *now, unsigned *pending)
{
    const struct step *step;
    int fn = FN_nvmlDeviceGetMigMode, ret = answer_handle(fn, handle, now, &step);
    if (ret == SUCCESS && !pending)
        ret = INVALID_ARGUMENT;
    if (ret == SUCCESS) {
        *now = (unsigned)value(step, fn, handle, 0);
        *pending = (unsigned)value(step, fn, handle, 1);
    }
    return ret;
}

API int nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned *corrected,
                                  unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    const struct step *step;
    unsigned *outs[] = {corrected, uncorrected, pending, failed};
    int fn = FN_nvmlDeviceGetRemappedRows, ret = answer_handle(fn, handle, outs, &step);
    for (int i = 0; ret == SUCCESS && i < 4; i++) {
        if (!outs[i])
            return INVALID_ARGUMENT;
        *outs[i] = (unsigned)value(step, fn, handle, i);
    }
    return ret;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count,
                                                struct process *out)
{
    const struct step *step;
    int fn = FN_nvmlDeviceGetComputeRunningProcesses_v3;
    int ret = answer_handle(fn, handle, count, &step);
    if (ret != SUCCESS)
        return ret;
    unsigned room = *count;
    *count = step ? (unsigned)step->n_values / 4 : 0;
    if (*count > room)
        return INSUFFICIENT_SIZE;
    if (*count && !out)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < *count; i++) {
        const uint64_t *v = &step->values[4 * i];
        out[i] = (struct process){(unsigned)v[0], v[1], (unsigned)v[2], (unsigned)v[3]};
    }
    return SUCCESS;
}

/* One field: "value" and "type" of its step, else the default, else unsupported. */
static void get_field(nvmlDevice_t handle, struct field *out)
{
    static const struct { unsigned type; bool known; uint64_t value; } defaults[MAX_FIELDS] = {
#define PROCESS(fn, ...)
#define PROCESS_TEXT(fn, text)
#define DEVICE(fn, ...)
#define DEVICE_UINT(fn, value)
#define DEVICE_UINT_OF(fn, value)
#define DEVICE_ULL(fn, value)
#define DEVICE_TEXT(fn, text)
#define DEVICE_KEY(fn, key, value)
#define EVENT(name)
#define FIELD(id, type, value) [id] = {type, true, value},
#include "functions.def"
#include "undef.h"
    };
    static const size_t sizes[] = {8, 4, 8, 8, 8, 4, 2}; /* by nvmlValueType_t */
    const struct step *step;
    unsigned id = out->id;
    uint64_t bits;
    out->type = ULONGLONG;
    out->ret = NOT_SUPPORTED;
    out->value = 0;
    if (id >= MAX_FIELDS)
        return;
    out->ret = answer(FN_COUNT + (int)id, number_of(handle), &step);
    if (out->ret == SUCCESS && !step && !defaults[id].known)
        out->ret = NOT_SUPPORTED;
    if (out->ret != SUCCESS)
        return;
    bits = step && step->n_values > 0 ? step->values[0] : defaults[id].value;
    if (defaults[id].known)
        out->type = defaults[id].type;
    if (step && step->n_values > 1)
        out->type = (unsigned)step->values[1];
    /* As a store into the union's member would: the low bytes, the rest stays. */
    memcpy(&out->value, &bits, out->type <= USHORT ? sizes[out->type] : sizeof bits);
}

API int nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, struct field *out)
{
    const struct step *step;
    int ret = answer_handle(FN_nvmlDeviceGetFieldValues, handle, out, &step);
    if (ret != SUCCESS || count <= 0)
        return ret != SUCCESS ? ret : INVALID_ARGUMENT;
    int64_t before = clock_ns(CLOCK_REALTIME) / 1000;
    for (int i = 0; i < count; i++) {
        get_field(handle, &out[i]);
        out[i].timestamp_us = clock_ns(CLOCK_REALTIME) / 1000;
        out[i].latency_us = out[i].timestamp_us - before;
        before = out[i].timestamp_us;
    }
    return SUCCESS;
}
